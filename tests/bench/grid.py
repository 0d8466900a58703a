"""The cases of the release benchmark, section by section."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

ALGORITHMS = (
    "gae",
    "vtrace",
    "retrace",
    "lambda_returns",
    "discounted_returns",
    "eligibility_traces",
    "episodic_prefix_sum",
)
# Forward and backward, as a loop calls it and under torch.compile.
BACKWARD = ("backward", "compiled backward")
# The TorchRL modules run as one more entry beside the algorithms.
TORCHRL = "torchrl"
NAMES = (*ALGORITHMS, TORCHRL)

BATCH_MAJOR, TIME_MAJOR, TRAILING = "[N, T]", "[T, N]", "[*B, T, 1]"

HEADLINE = (4096, 128)
# 2^23 rows: at least 64 MB for every algorithm, from a single tile to 8192 steps.
BANDWIDTH = ((524288, 16), (131072, 64), (65536, 128), (16384, 512), (4096, 2048), (1024, 8192))
SHORT = ((32768, 8), (16384, 16), (32768, 32))
LONG = ((64, 65536), (8, 131072), (1, 1048576))
LAYOUTS = ((4096, 128), (16384, 128), (32768, 8), (16384, 512), (4096, 2048), (512, 4096))
MANY_ACTIONS = ((16384, 128), (4096, 512), (1024, 2048), (256, 8192))
# Where the compiled baselines are timed besides the headline: one shape of each regime.
COMPILED = ((16384, 16), (16384, 512), (512, 4096), (64, 65536), (1, 1048576))

MAIN = ((64, 128), (64, 512), (512, 128), (1024, 128), (16384, 128), (4096, 512), (16384, 512))
PRODUCTION = tuple((n, t) for t in (80, 128) for n in (4096, 8192, 19200, 38400))

MODULES = (
    ("GAE", (4096, 128)),
    ("GAE", (64, 512)),
    ("GAE", (8, 128)),
    ("VTrace", (4096, 128)),
    ("VTrace", (64, 512)),
    ("GAE single_pass", (4096, 128)),
)


@dataclass(frozen=True)
class Case:
    """One row of the benchmark. `variant` names what differs from the plain call."""

    section: str
    algorithm: str
    num_envs: int
    seq_len: int
    truncations: bool = True
    layout: str = BATCH_MAJOR
    dtype: str = "float32"
    actions: int = 0
    variant: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_envs, self.seq_len

    @property
    def label(self) -> str:
        parts = [
            self.algorithm,
            self.variant,
            f"{self.num_envs} x {self.seq_len}",
            self.layout,
            self.dtype,
            f"A={self.actions}" if self.actions else "",
            "" if self.truncations else "terminations only",
        ]
        return " ".join(part for part in parts if part)


def cases(names: tuple[str, ...] = NAMES) -> list[Case]:
    """Every case of the named algorithms; no two of them are the same call."""
    return [case for name in names for case in (_modules() if name == TORCHRL else _algorithm(name))]


def _algorithm(name: str) -> Iterator[Case]:
    def rows(section, shapes, **how):
        actions = 4 if name == "retrace" else 0
        for num_envs, seq_len in shapes:
            yield Case(section, name, num_envs, seq_len, **{"actions": actions, **how})

    yield from rows("truncations", (HEADLINE, (16384, 128), *BANDWIDTH))
    yield from rows("short", ((1024, 16), *SHORT))
    yield from rows("long", ((512, 4096), *LONG))
    if name == "retrace":
        yield from rows("actions", MANY_ACTIONS, actions=18)
    if name == "gae":
        for variant in BACKWARD:
            yield from rows("gradients", (HEADLINE, (16384, 512)), variant=variant)
    for layout in (TIME_MAJOR, TRAILING):
        yield from rows("layouts", LAYOUTS, layout=layout)
    if name in ("gae", "vtrace"):
        yield from rows("next values", (HEADLINE, (16384, 512)), variant="next_values")
    yield from rows("main", MAIN, truncations=False)
    yield from rows("production", PRODUCTION, truncations=False)
    for dtype in ("bfloat16", "float16", "float64"):
        yield from rows("dtypes", (HEADLINE, (16384, 512)), dtype=dtype)


def _modules() -> Iterator[Case]:
    for module, (num_envs, seq_len) in MODULES:
        yield Case("torchrl", TORCHRL, num_envs, seq_len, layout=TRAILING, variant=module)


SECTIONS = {
    "truncations": "Terminations and truncations, 5 % each",
    "short": "Short horizon",
    "long": "Long horizon",
    "actions": "Retrace with 18 actions",
    "gradients": "Forward and backward",
    "layouts": "Layouts",
    "next values": "Next values given for every row",
    "main": "Main grid, terminations only",
    "production": "Production regime, terminations only",
    "dtypes": "Data types",
    "torchrl": "TorchRL modules, values stored",
}


def is_quick(case: Case) -> bool:
    """What the reach table reads, with the layouts of GAE alone."""
    if case.section == "layouts":
        return case.algorithm == "gae"
    return case.section in ("truncations", "short", "long", "actions", "gradients", "torchrl")


def baselines_of(case: Case, choice: str) -> bool:
    """Whether baselines run beside a case: `reach` at the headline shape, `all` at one of each regime too."""
    plain = case.truncations and (case.layout, case.dtype, case.variant) == (BATCH_MAJOR, "float32", "")
    shapes = {"none": (), "reach": (HEADLINE,), "all": (HEADLINE, *COMPILED)}[choice]
    return plain and case.actions in (0, 4) and case.shape in shapes
