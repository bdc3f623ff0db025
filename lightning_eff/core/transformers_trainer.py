"""Answer the Trainer of Hugging Face transformers, whose callbacks have other hooks than Lightning's.

It calls `getattr(callback, event)(args, state, control, **objects)`: without these methods a callback of this
package would end in an AttributeError about `on_init_end`. The names are those of events that may come first,
and Lightning has none of them; so nothing runs in a Lightning Trainer, and transformers is not imported.
"""

from __future__ import annotations

from typing import Any, NoReturn

from lightning_eff.core.errors import ConflictError

DOCS = "docs/migration/transformers.md"
"""Page that shows how a script around that Trainer becomes a recipe, or a Trainer of Lightning."""


class RejectsTransformersTrainer:
    """Mixin of every callback of this package.

    Example:
        >>> from lightning_eff.callbacks.empty_cache import EmptyCache
        >>> EmptyCache().on_init_end("args", "state", "control")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConflictError: EmptyCache is a callback of lightning.pytorch, ...
    """

    def on_init_end(self, *args: Any, **objects: Any) -> NoReturn:
        """Raise, as transformers' Trainer calls it at the end of its constructor.

        Raises:
            ConflictError: Always; the text names the Trainer to use.
        """
        del args, objects
        name = type(self).__name__
        text = (
            f"{name} is a callback of lightning.pytorch, not of transformers' Trainer: put the model into a "
            f"LightningModule and pass {name} to lightning.pytorch.Trainer(callbacks=[...]), or run "
            f"`lightning-eff train full_finetune model.name=NAME`; see {DOCS}"
        )
        raise ConflictError(text)

    # One that is added later (`add_callback`) is called by one of these first.
    on_train_begin = on_epoch_begin = on_step_begin = on_step_end = on_init_end
    on_prediction_step = on_evaluate = on_predict = on_log = on_save = on_init_end
