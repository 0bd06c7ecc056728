"""How PyTorch computes: mixed precision, one autocast context and one loss scaler that does nothing where it is not
needed; torch.compile."""
import contextlib
import copy
import os

import torch

MOST_OVERFLOWS = 100  # in a row: enough to get from the highest scale to the lowest
WHAT_TO_DO = ("The checkpoint before is kept. Look for bad rows with data.check, lower lr or clip_norm; "
              "run.detect_anomaly=true names the operation that produced the first NaN")
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def set_numerics(run):
    """Apply the switches of configs.RunConfig that decide how exactly and how fast PyTorch computes."""
    torch.backends.cudnn.benchmark = run.cudnn_benchmark and not run.deterministic
    torch.backends.cudnn.allow_tf32 = run.matmul_precision != "highest"
    torch.set_float32_matmul_precision(run.matmul_precision)
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    torch.use_deterministic_algorithms(run.deterministic)
    torch.autograd.set_detect_anomaly(run.detect_anomaly)


def require_finite(norm, module, losses):
    """Stop with a diagnosis when the gradient norm (after the all-reduce, so on all ranks alike) is NaN or infinite."""
    if torch.isfinite(norm):
        return
    broken = [name for name, p in module.named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all()]
    raise FloatingPointError(f"gradient norm {float(norm)}, losses {({k: float(v) for k, v in losses.items()})}; the "
                             f"step was not taken. Not finite: the gradients of {len(broken)} parameters, the first "
                             f"{', '.join(broken[:3])}. {WHAT_TO_DO}")


class HysteresisScaler(torch.amp.GradScaler):
    """GradScaler that backs off only after `hysteresis` overflows in a row, within [min_scale, max_scale].

    An overflow skips the optimiser step in any case. `agree(flag)` makes the ranks see the same overflows. An optimiser
    step waits for the device once, in `step`: the scale is known here as a number too.
    """
    COUNTERS = ("overflows_in_row", "overflows", "steps_since_growth")

    def __init__(self, device, amp, enabled, agree=bool):
        super().__init__(device, init_scale=amp.init_scale, growth_factor=amp.growth_factor,
                         backoff_factor=amp.backoff_factor, growth_interval=amp.growth_interval, enabled=enabled)
        self.amp, self.agree, self.number, self.overflow = amp, agree, amp.init_scale, False
        self.overflows_in_row = self.steps_since_growth = self.overflows = self.stuck = 0

    def step(self, optimizer):
        """The optimiser's step, unless a rank found an overflow. Call `unscale_` before."""
        if not self.is_enabled():
            return optimizer.step()
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        self.overflow = self.agree(sum(found) > 0)
        return None if self.overflow else optimizer.step()

    def update(self, new_scale=None):
        """Call once per optimiser step, after `step`. Returns whether the step was skipped because of an overflow;
        FloatingPointError, on all ranks, when a lower scale can no longer help."""
        if not self.is_enabled():
            return False
        self.stuck = self.stuck + 1 if self.overflow else 0
        if self.stuck == MOST_OVERFLOWS:  # on all ranks at the same step
            why = ("not the scale, but NaN or infinite values." if self.number <= self.amp.min_scale else
                   "it may be too high still (amp.init_scale, amp.strategy, amp.backoff_factor), or values are NaN.")
            raise FloatingPointError(f"{self.stuck} optimiser steps in a row overflowed, down to a loss scale of "
                                     f"{self.number:g}: {why} {WHAT_TO_DO}")
        self.number = self._next_scale(self.overflow)
        super().update(self.number)
        return self.overflow

    def get_scale(self):
        """The present loss scale; 1 when off."""
        return self.number if self.is_enabled() else 1.0

    def _next_scale(self, overflow):
        scale, a = self.number, self.amp
        self.overflows += overflow
        if a.strategy == "static":
            return scale
        self.overflows_in_row = self.overflows_in_row + 1 if overflow else 0
        self.steps_since_growth = 0 if overflow else self.steps_since_growth + 1
        if self.overflows_in_row >= a.hysteresis:
            self.overflows_in_row, scale = 0, scale * a.backoff_factor
        elif self.steps_since_growth >= a.growth_interval:
            self.steps_since_growth, scale = 0, scale * a.growth_factor
        return min(max(scale, a.min_scale), a.max_scale)

    def state_dict(self):
        """PyTorch's state and our counters."""
        return {**super().state_dict(), **{name: getattr(self, name) for name in self.COUNTERS}}

    def load_state_dict(self, state):
        """Adopt what `state_dict` gave."""
        if "scale" in state:  # not when saved with scaling off: start from init_scale
            super().load_state_dict(state)
            self.number = state["scale"]
        self.__dict__.update({name: state[name] for name in self.COUNTERS if name in state})


class Precision:
    """`with precision.autocast():` around the forward pass, and `precision.scaler`. `amp` is configs.AmpConfig."""

    def __init__(self, amp, device, agree=bool):
        kind = amp.dtype if device.type == "cuda" else "off"
        if kind == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            kind = "fp16"  # Turing only emulates bf16
        self.dtype, self.device = TYPES.get(kind), device
        self.scaler = HysteresisScaler(device.type, amp, enabled=kind == "fp16", agree=agree)
        why = "no GPU" if device.type == "cpu" else "bf16 is emulated on this GPU"
        why = "as configured" if kind == amp.dtype else why
        self.reason = f"precision: {kind if kind != 'off' else 'float32'} ({why})"

    def autocast(self):
        """The context of a forward pass."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)


def compile_gnn(gnn, wanted, say, backend="inductor"):
    """torch.compile the risk GNN, the largest part of every forward pass, if `wanted` and possible, else say why."""
    if not wanted:
        return
    n, k, device = 16, 4, next(gnn.parameters()).device
    parts = torch.zeros(1, n, 9), torch.zeros(1, n, 14), torch.zeros(1, n, k, 4), torch.full((1, n, k), -1)
    trial = copy.deepcopy(gnn).requires_grad_(True)  # phase 3 has frozen it
    trial.compile(backend=backend, dynamic=True)
    try:
        trial(*(x.to(device) for x in parts), torch.ones(1, n, dtype=torch.bool, device=device)).sum().backward()
    except Exception as error:  # compilers fail in many ways, and the program runs without
        words = " ".join(str(error).split())[:200]
        return say(f"NOTE: model.compile=true, but torch.compile does not work here ({type(error).__name__}: {words}); "
                   "nothing is compiled")
    gnn.compile(backend=backend, dynamic=True)
    say("torch.compile: the risk GNN is compiled")
