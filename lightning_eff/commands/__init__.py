"""The verbs of the command line; each verb is a module with a function `main(options)`, which cli.py calls.

Read first: _parser.py (words, options and examples of every verb), ls.py (a short verb), train.py. Several
verbs share report.py (the table of several runs), _recipe_file.py (a recipe named by its file), _logging.py,
_saved_run.py (config and checkpoint of a run) and _evaluation.py (validate, test, predict).
"""
