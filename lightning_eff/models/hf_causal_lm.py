"""Any causal language model of Hugging Face transformers, by hub name or local folder.

The architecture must be one of transformers' own: code that lies beside weights is never run, nor are kernels
fetched for attention. Weights are read from safetensors alone, since the older files are pickles. With
`HF_HUB_OFFLINE=1` nothing is asked of the network.

Configuration and file names are looked at in the constructor, so that a wrong name is told before anything
else happens; weights are read in `configure_model`, in the number format and on the device that the Trainer
builds models in, before techniques change the model. Under the meta device random weights stay there, and
read ones come to the CPU: there would be nothing to read them into.

The loss is the mean over real targets, and their number is its weight, so that a step of several
micro-batches has the gradient of the whole. Several documents in a row (`position_ids` that begin anew) keep
apart only in models that look at positions so: whether this one does is tried on four tokens.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_eff.models._hub import check_weights, choose_attention, causal_lm_class, read_config, load_failure_message

log = logging.getLogger(__name__)

IGNORED_TARGET = -100
"""A label with this value adds nothing to the loss; transformers' own default."""
Batch = dict[str, Tensor]


class HFCausalLM(pl.LightningModule):
    """Next-token prediction by a model of transformers.

    A batch is a dictionary of integer tensors [B, T]: `input_ids`, `labels` (a token where it is a target,
    -100 elsewhere; the model compares each with what it said one position before), and, where there are
    some, `attention_mask` or `position_ids`.

    Args:
        name: Hub name or folder.
        pretrained: Read the weights; False draws them anew from the configuration, for pre-training.
        dtype: Of the weights; "auto" takes that of the files.
        attn_implementation: Name in transformers; "auto" is sdpa, or eager where the model has no sdpa.
        revision: Branch, tag or commit on the hub.
        vocab_size: Fewest rows of the embedding, for a tokenizer with more tokens; None leaves it as it is.
        pad_to_multiple_of: Rows of the embedding become a multiple of this: 64 suits tensor cores.

    Raises:
        ValueError: There is no such model, or one that transformers itself cannot build; its weights are
            pickles, quantized, or an adapter; a number is not positive.
        ModuleNotFoundError: transformers is not installed.

    Example:
        >>> HFCausalLM(name="nowhere/at-all", pad_to_multiple_of=0)
        Traceback (most recent call last):
        ValueError: pad_to_multiple_of=0 must be at least 1
    """

    def __init__(
        self,
        *,
        name: str,
        pretrained: bool = True,
        dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "float32",
        attn_implementation: Literal[
            "auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"
        ] = "auto",
        revision: str | None = None,
        vocab_size: int | None = None,
        pad_to_multiple_of: int | None = None,
    ) -> None:
        super().__init__()
        for key, value in (("vocab_size", vocab_size), ("pad_to_multiple_of", pad_to_multiple_of)):
            if value is not None and value < 1:
                text = f"{key}={value} must be at least 1"
                raise ValueError(text)
        self.save_hyperparameters()
        self._format: Any = dtype if dtype == "auto" else getattr(torch, dtype)
        self._config: Any = read_config(name, revision)
        self._attention = choose_attention(attn_implementation, causal_lm_class(name, self._config))
        if pretrained:
            check_weights(name, self._config)
        self._seed = int(torch.randint(2**31, (), device="cpu"))  # also where the model has no memory
        self.model: Any = None
        """The model of transformers, from `configure_model` on."""
        self.isolates_documents: bool | None = None
        """Whether attention stays within a packed document; None where it was not tried."""

    @override
    def configure_model(self) -> None:
        """Build the model and read its weights; further calls do nothing."""
        if self.model is not None:
            return
        with _drawing_from(self._seed):
            model = self._read() if self.hparams["pretrained"] else self._draw()
        self.model = model.train()
        self.isolates_documents = self._try_documents()
        parameters = list(model.parameters())
        text = "%s: %.1f M parameters in %s, attention by %s"
        count = sum(parameter.numel() for parameter in parameters) / 1e6
        log.info(text, self.hparams["name"], count, parameters[0].dtype, self._attention)

    def _read(self) -> Any:
        from transformers import AutoModelForCausalLM

        on_meta = torch.empty(0).device.type == "meta"
        try:
            with torch.device("cpu") if on_meta else nullcontext():
                model = AutoModelForCausalLM.from_pretrained(
                    self.hparams["name"],
                    revision=self.hparams["revision"],
                    config=self._config,
                    dtype=self._format,
                    attn_implementation=self._attention,
                    use_safetensors=True,
                    trust_remote_code=False,
                )
        except OSError as error:
            raise ValueError(load_failure_message(self.hparams["name"], str(error))) from error
        now: Any = model.get_input_embeddings().num_embeddings
        if self._rows(now) != now:
            model.resize_token_embeddings(self._rows(now))
        return model

    def _draw(self) -> Any:
        from transformers import AutoModelForCausalLM

        text_config = self._config.get_text_config()
        text_config.vocab_size = self._rows(text_config.vocab_size)
        dtype = torch.float32 if self._format == "auto" else self._format
        return AutoModelForCausalLM.from_config(
            self._config, dtype=dtype, attn_implementation=self._attention, trust_remote_code=False
        )

    def _rows(self, now: int) -> int:
        """Return how many rows the embedding shall have; never fewer than it has."""
        rows = max(now, self.hparams["vocab_size"] or 0)
        multiple = self.hparams["pad_to_multiple_of"] or 1
        return -(-rows // multiple) * multiple

    @torch.no_grad()
    def _try_documents(self) -> bool | None:
        """Change another document, then the same one, and see whether the last token notices."""
        if "position_ids" not in inspect.signature(self.model.forward).parameters:
            return False
        first = next(self.model.parameters())
        device, without_values = first.device, first.untyped_storage().device.type == "meta"
        if without_values or self._attention.startswith(("flash", "flex")):
            return None
        tokens = torch.tensor([[0, 1, 2, 3], [4, 5, 2, 3], [0, 1, 4, 3]], device=device)
        positions = torch.tensor([[0, 1, 0, 1]], device=device).expand(3, -1)
        self.model.eval()
        last = self(tokens, position_ids=positions)[:, -1].float()
        self.model.train()
        other, same = (last[1:] - last[0]).abs().amax(-1).tolist()
        # Masked attention leaks nothing at all; the state of a recurrent layer has leaked 0.3 % as much.
        return None if same == 0.0 else other <= 1e-4 * same

    @override
    def setup(self, stage: str) -> None:
        """Refuse data with more tokens than the embedding has rows.

        Raises:
            ValueError: It has.
        """
        data = getattr(self.trainer, "datamodule", None)
        tokens, rows = (
            getattr(data, "vocab_size", None),
            self._rows(self._config.get_text_config().vocab_size),
        )
        if isinstance(tokens, int) and tokens > rows:
            text = (
                f"the data has {tokens} tokens and the embedding of {self.hparams['name']} {rows} rows\n"
                f"  try: model.vocab_size={tokens}, or data.tokenizer={self.hparams['name']}"
            )
            raise ValueError(text)

    @override
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Return logits [B, T, vocab_size] for the token after each of `input_ids` [B, T]."""
        shape = input_ids.shape
        keywords: dict[str, Any] = {"attention_mask": attention_mask, "use_cache": False}
        if position_ids is not None:
            keywords["position_ids"] = position_ids
            if self._attention.startswith("flash"):  # it looks for documents in a single row alone
                input_ids, keywords["position_ids"] = input_ids.reshape(1, -1), position_ids.reshape(1, -1)
        return self.model(input_ids=input_ids, **keywords).logits.view(*shape, -1)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy in nats per target; 0 when there is none.

        Args:
            logits: [B, T, vocab_size].
            labels: Integers [B, T]; each is compared with the logits one position before.
        """
        if logits.dtype in {torch.bfloat16, torch.float16}:
            logits = logits.float()
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED_TARGET)
        total = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
        )
        return total / num_targets(labels).clamp(min=1)

    def _loss_of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids") if key in batch}
        if "position_ids" in inputs and self.isolates_documents is False:
            text = (
                f"{type(self.model).__name__} lets a document in a packed row see those before it\n"
                "  try: data.packing=false, or data.packing=across to have it so"
            )
            raise ValueError(text)
        return self.loss(self(**inputs), batch["labels"]), num_targets(batch["labels"])

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        loss, count = self._loss_of(batch)
        self.log("train_loss", loss, prog_bar=True)
        return {"loss": loss, "weight": count}

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss, count = self._loss_of(batch)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True, batch_size=int(count))

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain AdamW: enough to train without a recipe, which brings its own."""
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=2e-5)


def num_targets(labels: Tensor) -> Tensor:
    """Return how many labels are compared with something: all real ones but a row's first.

    Example:
        >>> num_targets(torch.tensor([[5, 6, -100, 7]]))
        tensor(2)
    """
    return (labels[:, 1:] != IGNORED_TARGET).sum()


@contextmanager
def _drawing_from(seed: int) -> Generator[None]:
    """Draw from this seed inside, and leave the global random state as it was."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield
