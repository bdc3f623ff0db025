"""Parts of `callbacks/attention`: attention within the documents of packed rows."""
