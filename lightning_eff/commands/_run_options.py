"""Options of the verbs that show what a run has left: `report` and `generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Add = Callable[..., Any]
"""`add_argument` of a verb's parser."""


def add_report(add: Add) -> None:
    """Add the options of `report`."""
    add("--output-root", default="outputs", metavar="DIR", help="folder of the runs (outputs)")


def add_generate(add: Add) -> None:
    """Add the options of `generate`; values are checked when the verb runs."""
    add("--prompt", metavar="TEXT", help="text to continue; with --chat the user's turn")
    about = "the same from a file, - for the standard input; without both options it is read from there"
    add("--prompt-file", metavar="FILE", help=about)
    add("--chat", action="store_true", help="by the chat template of the data's tokenizer")
    add("--system", metavar="TEXT", help="with --chat: the system's turn")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="tokens to draw (64)")
    about = (
        "0 takes the likeliest token; 1 draws from the model's probabilities (0, or 1 with an option below)"
    )
    add("--temperature", type=float, metavar="T", help=about)
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    about = "draw from the likeliest tokens that together have this probability"
    add("--top-p", type=float, metavar="P", help=about)
    add("--num-samples", type=int, default=1, metavar="N", help="texts to draw (1)")
    add("--seed", type=int, metavar="N", help="of what is drawn (0)")
