"""The verbs of the command line, one module each, whose `main(options)` cli.py calls.

Read first: _parser.py (words, options and examples of every verb), ls.py (a short verb), train.py. Shared by
several verbs: report.py (the table of several runs), _recipe_file.py (a recipe named by its file),
_logging.py, _saved_run.py (config and checkpoint of a run) and _evaluation.py (validate, test, predict).
"""
