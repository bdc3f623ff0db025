"""What `data/text.py` is made of: documents from files, their tokens, rows of them, an order that resumes."""
