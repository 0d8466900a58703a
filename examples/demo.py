"""PPO learns CartPole-v1 with rl_triton's GAE, then with TorchRL's on the same seed: `make demo`."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from common import stage_table

RUNS = Path("runs", "demo")


def main() -> None:
    summaries = {}
    shutil.rmtree(RUNS, ignore_errors=True)
    for estimator in ("triton", "torchrl"):
        print(f"\n== PPO on CartPole-v1, advantages by {estimator}", flush=True)
        flags = (
            f"--env-id CartPole-v1 --seed 1 --stop-at 475 --estimator {estimator} --logdir {RUNS / estimator}"
        )
        subprocess.run([sys.executable, str(Path(__file__).with_name("ppo.py")), *flags.split()], check=True)
        summaries[estimator] = json.loads((RUNS / estimator / "summary.json").read_text())

    print("\n== Both runs, stage by stage")
    print(stage_table({name: summary["stages"] for name, summary in summaries.items()}))
    for name, summary in summaries.items():
        verdict = "reached" if summary["reached_stop_at"] else "missed"
        print(
            f"{name}: {verdict} a mean return of 475 in {summary['steps']} steps, "
            f"{summary['seconds']:.0f} s; evaluated at {summary['eval_return']:.0f}; "
            f"log and pictures in {RUNS / name}"
        )
    if not summaries["triton"]["reached_stop_at"]:
        sys.exit("error: the run with rl_triton's GAE did not reach 475")


if __name__ == "__main__":
    main()
