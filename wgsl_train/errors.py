"""Every error this package raises on purpose, in one tree.

* WgslTrainError
  - ConfigError         a field of a configuration, its value, the allowed range
  - ShapeError          a tensor does not fit the shape a kernel declares        (plan time)
  - TemplateError       a shader template does not render                        (plan time)
  - KernelCompileError  the driver refuses the rendered WGSL                     (compile time)
  - DeviceError         no adapter; a limit too low; out of memory; device lost
  - DataError           a text or token file: what is wrong, and where
  - CheckpointError     a checkpoint: file, tensor, expected and found
  - TrainingError       a run that cannot go on (non-finite gradients without end)
"""


class WgslTrainError(Exception):
    """Base class, so that callers can catch all of them at once."""


class ConfigError(WgslTrainError, ValueError):
    """A field of a configuration is out of its allowed range."""


class ShapeError(WgslTrainError, ValueError):
    """A tensor does not fit the shape a kernel declares, or a plan is inconsistent."""


class TemplateError(WgslTrainError):
    """A shader template does not render."""


class KernelCompileError(WgslTrainError):
    """The driver refuses the rendered WGSL."""


class DeviceError(WgslTrainError, RuntimeError):
    """No adapter, one below the limits a plan needs, out of memory, or a lost device."""


class DataError(WgslTrainError, ValueError):
    """A text or token file cannot be trained on as it is."""


class CheckpointError(WgslTrainError, ValueError):
    """A checkpoint is damaged, incomplete, or of another model."""


class TrainingError(WgslTrainError, RuntimeError):
    """A training run cannot go on."""
