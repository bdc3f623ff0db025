"""Tables of other tools' keys, and how a file of theirs becomes one command: parts of the verb `migrate`."""
