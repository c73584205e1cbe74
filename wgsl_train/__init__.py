"""Train Mamba language models on any GPU, through WebGPU. The public names; nothing else."""

from .config import MambaConfig, TrainConfig
from .data import Dataset
from .device import Device, list_adapters, request_device
from .errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DeviceError,
    KernelCompileError,
    ShapeError,
    TemplateError,
    TrainingError,
    WgslTrainError,
)
from .model import Model
from .train import Trainer

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Dataset",
    "Device",
    "DeviceError",
    "KernelCompileError",
    "MambaConfig",
    "Model",
    "ShapeError",
    "TemplateError",
    "TrainConfig",
    "Trainer",
    "TrainingError",
    "WgslTrainError",
    "list_adapters",
    "request_device",
]
