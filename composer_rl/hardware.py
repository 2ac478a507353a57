"""Hardware config -> GRPOConfig arguments."""

from typing import Any

from composer_rl.config import Device, HardwareConfig, Precision


def hardware_arguments(hardware: HardwareConfig, *, gpu: bool) -> dict[str, Any]:
    """Return the GRPOConfig fields of the machine; `gpu` says whether this machine has one."""
    precision = resolve_precision(hardware, gpu=gpu)
    return {
        "use_cpu": hardware.device == Device.cpu,
        "bf16": precision == Precision.bf16,
        "fp16": precision == Precision.fp16,
        "gradient_checkpointing": hardware.gradient_checkpointing,
        # Every weight of a text model is used in every forward; looking for others costs a traversal each time.
        "ddp_find_unused_parameters": False,
        "dataloader_pin_memory": gpu and hardware.device != Device.cpu,
    }


def resolve_precision(hardware: HardwareConfig, *, gpu: bool) -> Precision:
    """Return the autocast dtype of the run: precision=auto is bf16 on a GPU and fp32 on a CPU."""
    if hardware.precision != Precision.auto:
        return hardware.precision
    return Precision.bf16 if gpu and hardware.device != Device.cpu else Precision.fp32
