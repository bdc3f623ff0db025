"""Any causal language model of Hugging Face transformers, by hub name or local folder.

The architecture must be built into transformers, because code next to the weights is never executed, and no
attention kernels are downloaded. Weights must be safetensors files, because the older formats are pickles.
With `HF_HUB_OFFLINE=1` nothing uses the network.

The constructor checks the configuration and the names of the files, so a wrong name fails early. Before
techniques change the model, `configure_model` reads the weights to the Trainer's device. If this device is
the meta device, pretrained weights are read to the CPU, and random weights stay on the meta device.

The loss is the mean over targets. Each micro-batch is weighted by its number of targets, so a step has the
gradient of the full batch. Packed documents have `position_ids` that restart at 0. Such documents stay
separate if the model derives the attention mask from positions. A test with four tokens checks the model.
"""

from __future__ import annotations

import inspect
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_eff.models.gpt import IGNORED_TARGET, mean_cross_entropy

log = logging.getLogger(__name__)

Batch = dict[str, Tensor]
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class HFCausalLM(pl.LightningModule):
    """Next-token prediction by a model of transformers.

    A batch is a dictionary of integer tensors [B, T]: `input_ids`, `labels`, and optionally `attention_mask`
    or `position_ids`. The label of a token is the token itself, or -100 if the token is not a target. The
    loss compares each label with the logits one position earlier.

    Args:
        name: Hub name or folder of the model.
        pretrained: Whether to read pretrained weights; if False, weights are random, for pre-training.
        dtype: Dtype of the weights; "auto" keeps the dtype of the files.
        attn_implementation: Attention of transformers; "auto" means sdpa, or eager if the model has no sdpa.
        revision: Branch, tag or commit on the hub.
        vocab_size: Minimum number of embedding rows, for a tokenizer with more tokens than the model.
        pad_to_multiple_of: Multiple to which the number of embedding rows is padded; 64 suits tensor cores.

    Raises:
        ValueError: The model does not exist or is not built into transformers; the weights are pickles,
            quantized, or an adapter; a number is not positive.
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
                raise ValueError(f"{key}={value} must be at least 1")
        self.save_hyperparameters()
        self._weight_dtype: Any = dtype if dtype == "auto" else getattr(torch, dtype)
        self._config: Any = read_config(name, revision)
        self._attention: str = attn_implementation
        if pretrained:
            check_weights(name, self._config)
        # Drawn on the CPU, because a tensor on the meta device has no value.
        self._seed = int(torch.randint(2**31, (), device="cpu"))
        self.model: Any = None
        """The model of transformers; None before `configure_model`."""
        self.isolates_documents: bool | None = None
        """Whether attention stays within a packed document; None if not tested."""

    @override
    def configure_model(self) -> None:
        """Build the model and read its weights; later calls do nothing."""
        if self.model is not None:
            return
        from transformers import AutoModelForCausalLM

        name, text_config = self.hparams["name"], self._config.get_text_config()
        attention = None if self._attention == "auto" else self._attention
        options: dict[str, Any] = {"attn_implementation": attention, "trust_remote_code": False}
        on_meta = torch.empty(0).device.type == "meta"
        # Random weights depend on a seed from the constructor, not on the time at which the model is built.
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(self._seed)
            if not self.hparams["pretrained"]:
                text_config.vocab_size = self._embedding_rows(text_config.vocab_size)
                dtype = torch.float32 if self._weight_dtype == "auto" else self._weight_dtype
                model: Any = AutoModelForCausalLM.from_config(self._config, dtype=dtype, **options)
            else:
                options |= {"revision": self.hparams["revision"], "dtype": self._weight_dtype}
                try:
                    with torch.device("cpu") if on_meta else nullcontext():
                        model = AutoModelForCausalLM.from_pretrained(
                            name, config=self._config, use_safetensors=True, **options
                        )
                except OSError as error:
                    raise ValueError(load_failure_message(name, str(error))) from error
                num_rows = model.get_input_embeddings().num_embeddings
                # Added rows get transformers' initial values.
                if self._embedding_rows(num_rows) != num_rows:
                    model.resize_token_embeddings(self._embedding_rows(num_rows))
        self._attention = model.config._attn_implementation  # noqa: SLF001 - private in transformers 5
        # `from_pretrained` returns a model in evaluation mode.
        self.model = model.train()
        self.isolates_documents = self._test_isolation()
        parameters = list(model.parameters())
        millions = sum(parameter.numel() for parameter in parameters) / 1e6
        text = "%s: %.1f M parameters in %s, attention implementation %s"
        log.info(text, name, millions, parameters[0].dtype, self._attention)

    def _embedding_rows(self, current: int) -> int:
        """Return the number of rows that the embedding needs."""
        # With fewer rows than now, some of the checkpoint's tokens would lose their embedding.
        num_rows = max(current, self.hparams["vocab_size"] or 0)
        multiple = self.hparams["pad_to_multiple_of"] or 1
        return -(-num_rows // multiple) * multiple

    @torch.no_grad()
    def _test_isolation(self) -> bool | None:
        """Return whether a token's logits depend on its own document alone; None if this cannot be tested."""
        if "position_ids" not in inspect.signature(self.model.forward).parameters:
            return False
        weight = next(self.model.parameters())
        is_meta = (
            weight.untyped_storage().device.type == "meta"
        )  # also for fake tensors, whose `device` is not meta
        if is_meta or self._attention.startswith(("flash", "flex")):
            return None
        # Each row packs two documents of two tokens. Row 1 differs from row 0 in the first document, row 2
        # differs from row 0 in the second document.
        tokens = torch.tensor([[0, 1, 2, 3], [4, 5, 2, 3], [0, 1, 4, 3]], device=weight.device)
        positions = torch.tensor([[0, 1, 0, 1]], device=weight.device).expand(3, -1)
        self.model.eval()
        last = self(tokens, position_ids=positions)[:, -1].float()
        self.model.train()
        other, same = (last[1:] - last[0]).abs().amax(-1).tolist()
        # With masked attention, a change of the first document has no effect on the last token. With a
        # recurrent layer, the effect is about 0.3 % of the effect of a change of the second document.
        return None if same == 0.0 else other <= 1e-4 * same

    @override
    def setup(self, stage: str) -> None:
        self.check_data(getattr(self.trainer, "datamodule", None))

    def check_data(self, data: object) -> None:
        """Check that the model has an embedding for each token and position of a data module.

        Raises:
            ValueError: The data has more tokens, or longer rows, than the model supports.
        """
        self._check_length(getattr(data, "context_length", None))
        num_tokens = getattr(data, "vocab_size", None)
        num_rows = self._embedding_rows(self._config.get_text_config().vocab_size)
        name = self.hparams["name"]
        if isinstance(num_tokens, int) and num_tokens > num_rows:
            raise ValueError(
                f"the data has {num_tokens} tokens, but the embedding of {name} has {num_rows} rows\n"
                f"  try: model.vocab_size={num_tokens}, or data.tokenizer={name}"
            )

    def _check_length(self, length: object) -> None:
        """Reject rows with more tokens than the model has positions; rotary positions have no limit."""
        config = self._config.get_text_config()
        most = getattr(config, "max_position_embeddings", None)
        is_rotary = hasattr(config, "rope_parameters")
        if isinstance(length, int) and isinstance(most, int) and length > most and not is_rotary:
            msg = f"rows of {length} tokens are longer than the {most} positions of {self.hparams['name']}"
            msg += f"\n  try: data.context_length={most}"
            raise ValueError(msg)

    @override
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Return logits [B, T, vocab_size] for the token after each of `input_ids` [B, T]."""
        shape = input_ids.shape
        if position_ids is None:
            self._check_length(shape[1])
        keywords: dict[str, Any] = {"attention_mask": attention_mask, "use_cache": False}
        if position_ids is not None:
            keywords["position_ids"] = position_ids
            # In transformers, flash attention detects documents only if the batch has a single row.
            if self._attention.startswith("flash"):
                input_ids, keywords["position_ids"] = input_ids.reshape(1, -1), position_ids.reshape(1, -1)
        return self.model(input_ids=input_ids, **keywords).logits.view(*shape, -1)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per target; 0 without targets.

        Args:
            logits: [B, T, vocab_size].
            labels: Integers [B, T]; a label is compared with the logits one position earlier.
        """
        return mean_cross_entropy(logits, F.pad(labels[:, 1:], (0, 1), value=IGNORED_TARGET))

    def _batch_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids") if key in batch}
        if "position_ids" in inputs and self.isolates_documents is False:
            raise ValueError(
                f"{type(self.model).__name__} lets a document in a packed row attend to earlier documents\n"
                "  try: data.packing=false, or data.packing=grouped"
            )
        labels = batch["labels"]
        # The weight counts the labels with a prediction; the first label of a row has no prediction.
        return self.loss(self(**inputs), labels), (labels[:, 1:] != IGNORED_TARGET).sum()

    @override
    def on_train_start(self) -> None:
        padding = getattr(getattr(self.trainer, "datamodule", None), "padding_fraction", None)
        if padding is not None:
            self.log("padding_fraction", padding)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        loss, count = self._batch_loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return {"loss": loss, "loss_weight": count}

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss, count = self._batch_loss(batch)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True, batch_size=int(count))

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain AdamW, for training without a recipe; a recipe has its own optimizer."""
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=2e-5)

    def generate(self, tokens: Tensor, *, max_new_tokens: int, **options: Any) -> Tensor:
        """Append at most `max_new_tokens` tokens to each row of `tokens` [B, T]; call `eval()` first.

        `options` are passed to the `generate` method of transformers, which also applies the model's
        generation config.
        """
        # Prompts have no padding, so every token takes part in attention.
        options |= {"attention_mask": torch.ones_like(tokens), "max_new_tokens": max_new_tokens}
        return self.model.generate(input_ids=tokens, **options)


def read_config(name: str, revision: str | None) -> Any:
    """Return the configuration of a causal language model, by hub name or folder.

    Raises:
        ValueError: The configuration cannot be loaded, needs custom code, or is of another kind of model.
        ModuleNotFoundError: transformers is not installed.
    """
    try:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"name={name!r} needs transformers: pip install 'lightning-eff[hf]'"
        ) from error
    if (Path(name).expanduser() / "adapter_config.json").is_file():
        reason = "holds an adapter, which transformers would load too: name the model that it belongs to"
        raise ValueError(f"name={name!r} {reason}")
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(load_failure_message(name, str(error))) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = config.model_type
        raise ValueError(f"name={name!r} is a {kind}: transformers has no causal language model of this type")
    return config


def load_failure_message(name: str, upstream_message: str) -> str:
    """Return a message with cause and remedy for a model that transformers cannot load."""
    if "trust_remote_code" in upstream_message:
        reason = "needs custom code, which is never executed: name a model that is built into transformers"
        return f"name={name!r} {reason}"
    first = next(iter(upstream_message.strip().splitlines()), "")
    return f"name={name!r} cannot be loaded: {first}\n  try: a folder with config.json and *.safetensors"


def check_weights(name: str, config: Any) -> None:
    """Check the format of a model's weights; the files are checked if the model is a local folder.

    Raises:
        ValueError: The weights are quantized, pickled or missing.
    """
    folder = Path(name).expanduser()
    weights = list(folder.glob("*.safetensors"))
    # Irregular files are not read, because a FIFO would wait for a writer, and a device may never end.
    irregular = [file.name for file in weights if not file.is_file()]
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    problem = ""
    if getattr(config, "quantization_config", None) is not None:
        problem = "has quantized weights: name the model that they were quantized from"
    elif irregular:
        problem = f"has weights in {irregular[0]}, which is not a regular file"
    elif folder.is_dir() and not weights:
        problem = "has no *.safetensors\n  try: model.pretrained=false for random weights"
        if pickles:
            problem = (
                f"has weights as a pickle ({pickles[0]}), which may execute code and is not read\n"
                "  try: convert it where you trust it: model.save_pretrained(folder) writes safetensors"
            )
    if problem:
        raise ValueError(f"name={name!r} {problem}")
