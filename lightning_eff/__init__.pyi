# Written by `make stubs`: the types of the lazy names in __init__.py.

from lightning_eff.callbacks.data_preload import DataPreload as DataPreload
from lightning_eff.callbacks.empty_cache import EmptyCache as EmptyCache
from lightning_eff.callbacks.empty_cache import release as release
from lightning_eff.callbacks.exact_resume import ExactResume as ExactResume
from lightning_eff.callbacks.exact_resume import resumable as resumable
from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation as GradientAccumulation
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing as GradientCheckpointing
from lightning_eff.callbacks.gradient_checkpointing import recompute as recompute
from lightning_eff.callbacks.micro_batch import MicroBatch as MicroBatch
from lightning_eff.callbacks.optimizer_choice import OptimizerChoice as OptimizerChoice
from lightning_eff.callbacks.peft_adapter import PeftAdapter as PeftAdapter
from lightning_eff.callbacks.peft_adapter import adapt as adapt
from lightning_eff.callbacks.torch_compile import TorchCompile as TorchCompile
from lightning_eff.callbacks.torch_compile import compile_in_place as compile_in_place
from lightning_eff.callbacks.triton_gemm import TritonGemm as TritonGemm
from lightning_eff.callbacks.triton_gemm import swap as swap
from lightning_eff.checkpoint_io.durable import Durable as Durable
from lightning_eff.comparison.modules import compare as compare
from lightning_eff.comparison.result_table import comparison_table as comparison_table
from lightning_eff.config.composition import register as register
from lightning_eff.core.model_surgery import Stage as Stage
from lightning_eff.core.model_surgery import apply as apply
from lightning_eff.kernels.cross_entropy import linear_cross_entropy as linear_cross_entropy
from lightning_eff.kernels.cross_entropy import linear_kl as linear_kl
from lightning_eff.kernels.cross_entropy import token_logprobs as token_logprobs
from lightning_eff.kernels.linear import TritonLinear as TritonLinear
from lightning_eff.kernels.matmul import gemm as gemm
from lightning_eff.kernels.tiles import explain_tiles as explain_tiles
from lightning_eff.microbatching.fabric import ExactGradient as ExactGradient
from lightning_eff.monitors.efficiency_report import EfficiencyReport as EfficiencyReport
from lightning_eff.monitors.gradient_check import GradientCheck as GradientCheck
from lightning_eff.monitors.progress import Progress as Progress
from lightning_eff.monitors.text_sample import TextSample as TextSample
from lightning_eff.optimizer.cpu_offload import CpuOffload as CpuOffload
from lightning_eff.optimizer.in_backward import InBackward as InBackward
from lightning_eff.optimizer.muon import Muon as Muon
from lightning_eff.planner.prediction import predict as predict
from lightning_eff.planner.prediction import predict_step as predict_step
from lightning_eff.precision.auto import AutoPrecision as AutoPrecision
from lightning_eff.precision.auto import step_context as step_context
from lightning_eff.precision.quantized_base import QuantizedBase as QuantizedBase
from lightning_eff.scheduler.warmup_decay import WarmupDecay as WarmupDecay
from lightning_eff.strategy.deepspeed_zero import DeepSpeedZero as DeepSpeedZero
from lightning_eff.strategy.fsdp2 import FSDP2 as FSDP2

__version__: str
