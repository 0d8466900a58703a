"""The benchmark itself: it must refuse wrong numbers, keep what it measured, and publish all or nothing."""

import dataclasses
import json
import math
import subprocess

import bench_cpu
import bench_release
import pytest
import torch
from bench import baselines, grid, host_profile, measure, pictures, reach, report, timing, workloads

CPU = torch.device("cpu")
ACTIONS = {"retrace": 3}
PEERS = (
    *baselines.COMPILED,
    baselines.LOOP,
    baselines.NUMPY,
    baselines.TORCHRL,
    baselines.TORCHRL_VECTORIZED,
)


@pytest.fixture(autouse=True)
def few_samples(monkeypatch):
    monkeypatch.setattr(timing, "SAMPLES", 8)


def small(algorithm, num_envs=6, seq_len=20, **how):
    return grid.Case("truncations", algorithm, num_envs, seq_len, actions=ACTIONS.get(algorithm, 0), **how)


def replace_algorithm(monkeypatch, name, function):
    changed = dataclasses.replace(workloads.ALGORITHMS[name], function=function)
    monkeypatch.setitem(workloads.ALGORITHMS, name, changed)


def no_timing(*args):
    raise AssertionError("timed")


def measured_row(case):
    """A row of plausible numbers, as a run on a GPU would give it."""
    nbytes = 18 * case.num_envs * case.seq_len
    copy = 1.5 + nbytes / 4e6
    others = {name: {"full_us": 300.0, "full_p90_us": 310.0} for name in PEERS}
    others[baselines.ASSOCIATIVE] |= {"device_us": 1.5 * copy, "launches": 3.0}
    for name in (baselines.TORCHRL_MODULE, baselines.TORCHRL_MODULE_VECTORIZED):
        others[name] = {"full_us": 9000.0, "full_p90_us": 9100.0}
    return {
        **dataclasses.asdict(case),
        "full_us": 24.0,
        "full_p90_us": 25.0,
        "one_op_us": 15.0,
        "yardsticks": {baselines.VALUE_FORWARD: 2500.0},
        "bytes": nbytes,
        "device_us": 1.2 * copy,
        "device_p90_us": 1.3 * copy,
        "launches": 1.0,
        "copy_us": copy,
        "gb_per_s": nbytes / (1.2 * copy) / 1e3,
        "copy_percent": 100 / 1.2,
        "baselines": others,
    }


@pytest.fixture
def root(tmp_path):
    """A repository as far as promotion is concerned."""
    (tmp_path / "docs").mkdir()
    for page in (tmp_path / "README.md", tmp_path / "docs" / "benchmarks.md"):
        page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    return tmp_path


@pytest.fixture
def history(root):
    return root / "docs" / "benchmark-history"


@pytest.fixture
def staged(history):
    candidate = report.Candidate(history, report.environment("Some GPU", "python tests/bench_release.py"))
    candidate.rows = {case: measured_row(case) for case in grid.cases()}
    candidate.write()
    return candidate


def files(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


class TestGrid:
    def test_no_call_is_listed_twice(self):
        calls = [dataclasses.replace(case, section="") for case in grid.cases()]
        assert len(set(calls)) == len(calls)

    def test_the_grid_holds_every_row_that_the_reach_table_reads(self):
        checks = reach.checks([measured_row(case) for case in grid.cases()])
        assert [check for check in checks if check.measured is None] == []

    def test_quick_leaves_out_only_the_layouts_of_the_other_algorithms(self):
        checks = reach.checks([measured_row(case) for case in grid.cases() if grid.is_quick(case)])
        unmeasured = {(check.what, check.who) for check in checks if check.measured is None}
        assert unmeasured == {
            (f"device, {layout} against {grid.BATCH_MAJOR}", name)
            for layout in (grid.TIME_MAJOR, grid.TRAILING)
            for name in grid.ALGORITHMS[1:]
        }

    def test_large_cases_move_enough_bytes(self):
        # Nine bytes a row are the least that any algorithm moves.
        assert all(9 * num_envs * seq_len >= 64e6 for num_envs, seq_len in grid.BANDWIDTH)


class TestGate:
    @pytest.mark.parametrize("algorithm", grid.ALGORITHMS)
    @pytest.mark.parametrize("layout", [grid.BATCH_MAJOR, grid.TIME_MAJOR, grid.TRAILING])
    def test_right_numbers_pass(self, algorithm, layout):
        workload = workloads.prepare(small(algorithm, layout=layout), CPU)
        workload.check(workload.call(**workload.inputs), None)

    @pytest.mark.parametrize("wrong", [1e-3, math.nan])
    def test_one_wrong_number_is_refused_before_anything_is_timed(self, monkeypatch, wrong):
        right = workloads.ALGORITHMS["gae"].function

        def function(*args, **kwargs):
            advantages, targets = right(*args, **kwargs)
            targets[-1, 3] += wrong
            return advantages, targets

        replace_algorithm(monkeypatch, "gae", function)
        monkeypatch.setattr(timing, "full_call", no_timing)
        with pytest.raises(workloads.WrongNumbers, match="output 1: 1 of 120"):
            measure.measure(small("gae"), CPU)

    def test_a_wrong_shape_is_refused(self):
        with pytest.raises(workloads.WrongNumbers, match="shape"):
            workloads.compare((torch.zeros(6, 19),), (torch.zeros(6, 20),))

    def test_a_missing_output_is_refused(self):
        with pytest.raises(workloads.WrongNumbers, match="1 outputs where 2"):
            workloads.compare((torch.zeros(6, 20),), (torch.zeros(6, 20),) * 2)

    def test_every_repeated_block_is_compared(self):
        repeated = torch.zeros(12, 20)
        repeated[11, 19] = 1
        with pytest.raises(workloads.WrongNumbers):
            workloads.compare((repeated,), (torch.zeros(4, 20, dtype=torch.float64),))

    @pytest.mark.parametrize("variant", grid.BACKWARD)
    def test_backward_is_compared_with_float64_gradients(self, variant):
        workload = workloads.prepare(small("gae", variant=variant), CPU)
        gradients = workload.call(**workload.inputs)
        workload.check(gradients, None)
        gradients[0][0, 0] += 1
        with pytest.raises(workloads.WrongNumbers):
            workload.check(gradients, None)

    @pytest.mark.parametrize("algorithm", grid.ALGORITHMS)
    def test_windows_give_what_the_whole_loop_gives(self, monkeypatch, algorithm):
        spec = workloads.ALGORITHMS[algorithm]
        inputs = workloads.draw(small(algorithm, 3, 200), spec, CPU)
        whole = workloads.expected_outputs(spec, inputs, spec.options)
        monkeypatch.setattr(workloads, "WINDOW", 16)
        monkeypatch.setattr(workloads, "OVERLAP", 48)
        for walked, due in zip(workloads.expected_outputs(spec, inputs, spec.options), whole, strict=True):
            known = ~walked.isnan()
            assert known.double().mean() > 0.99
            torch.testing.assert_close(walked[known], due[known])

    def test_windows_that_cover_too_little_judge_nothing(self):
        mostly_unknown = torch.full((1, 100), math.nan)
        with pytest.raises(workloads.WrongNumbers, match="too few"):
            workloads.compare((torch.zeros(1, 100),), (mostly_unknown,))


class TestLeastBytes:
    def test_dense_inputs_and_outputs_count_once(self):
        inputs = {"gradients": torch.zeros(2, 8), "dones": torch.zeros(2, 8, dtype=torch.bool)}
        assert workloads.least_bytes(inputs, 1) == 64 + 16 + 64

    def test_bootstrap_values_count_by_the_sector(self):
        flags = torch.zeros(1, 32, dtype=torch.bool)
        truncateds = flags.clone()
        # Rows 0 and 7 share a sector of eight floats, row 20 has its own, row 31 terminated.
        truncateds[0, [0, 7, 20, 31]] = True
        flags[0, 31] = True
        inputs = {
            "rewards": torch.zeros(1, 32),
            "bootstrap_values": torch.zeros(1, 32),
            "terminateds": flags,
            "truncateds": truncateds,
        }
        assert workloads.least_bytes(inputs, 0) == 128 + 2 * 32 + 32 + 32

    def test_action_probabilities_count_by_the_sector(self):
        inputs = {
            "rewards": torch.zeros(1, 2),
            "action_probs_target": torch.zeros(1, 2, 16),
            "actions": torch.tensor([[0, 15]]),
        }
        assert workloads.least_bytes(inputs, 0) == 8 + 2 * 32 + 16


class TestBaselines:
    @pytest.mark.parametrize("algorithm", grid.ALGORITHMS)
    @pytest.mark.parametrize("truncations", [True, False])
    def test_all_compute_the_right_numbers(self, algorithm, truncations):
        workload = workloads.prepare(small(algorithm, truncations=truncations), CPU)
        assert {baselines.DOUBLING, baselines.ASSOCIATIVE, baselines.LOOP, baselines.NUMPY} <= set(
            workload.baselines
        )
        for build in workload.baselines.values():
            workload.check(measure._tensors(build()(), CPU), baselines.TOLERANCE)

    def test_a_wrong_one_is_named_and_not_timed(self, monkeypatch):
        monkeypatch.setattr(baselines, "doubling_scan", lambda a, b, reverse: a)
        monkeypatch.setattr(measure, "baselines_of", lambda case, choice: True)
        row = measure.measure(small("episodic_prefix_sum"), CPU, "all")
        assert row["baselines"][baselines.DOUBLING].keys() == {"error"}
        assert "WrongNumbers" in row["baselines"][baselines.DOUBLING]["error"]
        assert row["baselines"][baselines.LOOP]["full_us"] > 0
        assert "WrongNumbers" in measure.describe(row)

    def test_they_run_at_the_shapes_chosen(self):
        count = {
            choice: sum(grid.baselines_of(case, choice) for case in grid.cases())
            for choice in ("none", "reach", "all")
        }
        assert count == {"none": 0, "reach": 7, "all": 7 * (1 + len(grid.COMPILED))}


class TestSweep:
    def run(self, history, *arguments):
        return bench_release.main(["--dry-run", "--gpu", "GPU", "--history", str(history), *arguments])

    def rows(self, history):
        return json.loads((history / "unreleased.json").read_text())["rows"]

    def test_stages_and_publishes_nothing(self, history, root, capsys):
        before = files(root)
        arguments = ("--algorithms", "eligibility_traces", "--section", "short")
        assert self.run(history, *arguments) == 0
        new = {path.name for path in files(root).keys() - before.keys()}
        assert new == {"unreleased.md", "unreleased.json"}
        assert {row["algorithm"] for row in self.rows(history)} == {"eligibility_traces"}
        text = (history / "unreleased.md").read_text()
        assert (
            "GPU" in text and "python tests/bench_release.py --dry-run" in text and torch.__version__ in text
        )
        assert "eligibility_traces" in capsys.readouterr().out

    def test_a_later_run_adds_its_rows(self, history):
        self.run(history, "--algorithms", "eligibility_traces", "--section", "short")
        self.run(history, "--algorithms", "episodic_prefix_sum", "--section", "short")
        found = {row["algorithm"] for row in self.rows(history)}
        assert found == {"eligibility_traces", "episodic_prefix_sum"}

    def test_rows_of_other_code_are_dropped(self, history, monkeypatch):
        self.run(history, "--algorithms", "eligibility_traces", "--section", "short")
        monkeypatch.setattr(report, "source_digest", lambda: "changed")
        self.run(history, "--algorithms", "episodic_prefix_sum", "--section", "short")
        assert {row["algorithm"] for row in self.rows(history)} == {"episodic_prefix_sum"}

    def test_no_update_stages_nothing(self, history, root, capsys):
        before = files(root)
        self.run(history, "--no-update", "--algorithms", "eligibility_traces", "--section", "short")
        assert files(root) == before
        assert "eligibility_traces 8 x 8" in capsys.readouterr().out

    def test_a_wrong_algorithm_fails_the_run_but_not_the_others(self, history, monkeypatch, capsys):
        replace_algorithm(monkeypatch, "gae", lambda **inputs: (inputs["rewards"], inputs["values"]))
        names = ("gae", "episodic_prefix_sum")
        assert self.run(history, "--algorithms", *names, "--section", "short") == 1
        errors = {row["algorithm"]: row.get("error") for row in self.rows(history)}
        assert "WrongNumbers" in errors["gae"] and errors["episodic_prefix_sum"] is None
        assert "not timed: WrongNumbers" in (history / "unreleased.md").read_text()
        assert "WrongNumbers" in capsys.readouterr().out

    def test_interrupted_it_keeps_the_finished_rows(self, history, monkeypatch, capsys):
        whole = bench_release.measure
        calls = []

        def interrupted(case, *args):
            calls.append(case)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return whole(case, *args)

        monkeypatch.setattr(bench_release, "measure", interrupted)
        monkeypatch.setattr(bench_release, "DRY_ENVS", 65536)
        assert self.run(history, "--algorithms", "episodic_prefix_sum", "--section", "short") == 1
        assert len(self.rows(history)) == 2
        assert "interrupted" in capsys.readouterr().err

    def test_parent_sweep_runs_each_algorithm_in_a_process(self, history, monkeypatch):
        commands = []

        def child(command, check):
            commands.append(command)
            return subprocess.CompletedProcess(command, bench_release.main(command[2:]))

        monkeypatch.setattr(subprocess, "run", child)
        names = ("eligibility_traces", "episodic_prefix_sum")
        assert self.run(history, "--parent-sweep", "--algorithms", *names, "--section", "short") == 0
        assert len(commands) == 2 and all("--parent-sweep" not in command for command in commands)
        staged = json.loads((history / "unreleased.json").read_text())
        assert {row["algorithm"] for row in staged["rows"]} == set(names)
        assert "--parent-sweep" in staged["environment"]["command"]

    def test_parent_sweep_interrupted_says_how_it_was_started(self, history, monkeypatch):
        def child(command, check):
            bench_release.main(command[2:])
            raise KeyboardInterrupt

        monkeypatch.setattr(subprocess, "run", child)
        names = ("eligibility_traces", "episodic_prefix_sum")
        assert self.run(history, "--parent-sweep", "--algorithms", *names, "--section", "short") == 1
        staged = json.loads((history / "unreleased.json").read_text())
        assert {row["algorithm"] for row in staged["rows"]} == {"eligibility_traces"}
        assert "--parent-sweep" in staged["environment"]["command"]

    def test_modules_are_skipped_loudly_without_torchrl(self, history, monkeypatch, capsys):
        monkeypatch.setitem(__import__("sys").modules, "torchrl", None)
        self.run(history, "--algorithms", "torchrl")
        assert "SKIPPED torchrl GAE 4096 x 128" in capsys.readouterr().out

    @pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a CUDA device")
    def test_needs_a_gpu(self, capsys):
        with pytest.raises(SystemExit):
            bench_release.main(["--quick"])
        assert "needs a CUDA device" in capsys.readouterr().err


class TestModules:
    @pytest.mark.parametrize("variant", ["GAE", "VTrace", "GAE single_pass"])
    def test_pass_the_gate_and_so_do_their_peers(self, variant):
        pytest.importorskip("torchrl")
        case = grid.Case("torchrl", grid.TORCHRL, 3, 12, layout=grid.TRAILING, variant=variant)
        row = measure.measure(case, CPU)
        assert row["full_us"] > 0
        assert row["baselines"] and all("error" not in other for other in row["baselines"].values())


class TestPromote:
    def test_publishes_and_clears_the_stage(self, root, history, staged):
        written = report.promote("v1.2.3", root)
        assert {path.relative_to(root).as_posix() for path in written} == {
            "benchmarks.md",
            "README.md",
            "docs/benchmarks.md",
            *(f"docs/benchmark-history/v1.2.3.{suffix}" for suffix in ("md", "json")),
            *(
                f"docs/benchmark-history/{picture}-{theme}.png"
                for picture in report.PICTURES
                for theme in pictures.THEMES
            ),
        }
        assert not list(history.glob("unreleased*"))
        text = (root / "benchmarks.md").read_text()
        for due in (
            "Some GPU",
            torch.__version__,
            "python tests/bench_release.py",
            "Where a baseline is close",
        ):
            assert due in text
        readme = (root / "README.md").read_text()
        assert readme.startswith("before\n") and readme.endswith("after\n") and "old" not in readme
        assert all(name in readme for name in grid.ALGORITHMS) and "Some GPU" in readme
        assert json.loads((history / "v1.2.3.json").read_text())["rows"] == list(staged.rows.values())
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in history.glob("*.png"))

    @pytest.mark.parametrize(
        "spoil, version, reason",
        [
            (lambda root, history: (history / "unreleased.json").unlink(), "v1.2.3", "no candidate"),
            (lambda root, history: (history / "v1.2.3.md").write_text("there"), "v1.2.3", "exists"),
            (lambda root, history: None, "1.2.3", "v1.2.3"),
            (lambda root, history: (root / "README.md").write_text("no markers"), "v1.2.3", "markers"),
        ],
        ids=["no candidate", "existing version", "malformed version", "no markers"],
    )
    def test_touches_no_file_when_it_cannot(self, root, history, staged, spoil, version, reason):
        spoil(root, history)
        before = files(root)
        with pytest.raises(report.ReportError, match=reason):
            report.promote(version, root)
        assert files(root) == before

    def test_refuses_a_candidate_with_failed_rows(self, root, history, staged):
        case = next(iter(staged.rows))
        staged.add(report.failed(case, workloads.WrongNumbers("off")))
        before = files(root)
        with pytest.raises(report.ReportError, match="1 rows of the candidate failed"):
            report.promote("v1.2.3", root)
        assert files(root) == before

    def test_the_command_says_why_it_did_nothing(self, history, capsys):
        assert bench_release.main(["--promote", "--version", "v1.2.3", "--history", str(history)]) == 1
        assert "no candidate is staged" in capsys.readouterr().err

    def test_needs_a_version(self, capsys):
        with pytest.raises(SystemExit):
            bench_release.main(["--promote"])
        assert "--version" in capsys.readouterr().err


class TestReport:
    def test_reach_says_met_missed_and_not_measured(self):
        case = grid.Case("truncations", "gae", *grid.HEADLINE)
        row = measured_row(case) | {"full_us": 45.0}
        verdicts = {(check.what, check.who): check for check in reach.checks([row])}
        full_call = verdicts["full-call", "gae"]
        assert full_call.measured == 3.0 and full_call.verdict == "missed" and full_call.ratio == 2 / 3
        assert verdicts["device", "gae"].verdict == "met"
        assert verdicts["full-call", "vtrace"].verdict == "not measured"

    def test_a_failed_row_is_no_measurement(self):
        case = grid.Case("truncations", "gae", *grid.HEADLINE)
        checks = reach.checks([report.failed(case, ValueError("broken"))])
        assert {check.verdict for check in checks} == {"not measured"}

    def test_close_baselines_are_shown_by_either_clock(self):
        row = measured_row(grid.Case("truncations", "gae", *grid.HEADLINE))
        row["baselines"][baselines.LOOP]["full_us"] = 1.1 * row["full_us"]
        shown = report.close_table([row])
        assert f"| {baselines.LOOP} | full | 24 | 26.4 | 1.10 |" in shown
        assert f"| {baselines.ASSOCIATIVE} | device |" in shown
        assert baselines.DOUBLING not in shown

    def test_records_come_from_the_newest_report_on_that_gpu(self, root, history, staged, monkeypatch):
        monkeypatch.setattr(pictures, "draw", lambda data: {})
        name = staged.about["device_name"]
        case = next(iter(staged.rows))
        assert report.recorded(history, name)[case]["full_us"] == 24.0
        for version, full in (("v1.2.3", 30.0), ("v1.10.0", 31.0)):
            staged.rows[case]["full_us"] = full
            staged.write()
            report.promote(version, root)
        assert report.recorded(history, name)[case]["full_us"] == 31.0
        assert report.recorded(history, "another") == {}

    def test_pictures_need_only_what_was_measured(self):
        case = grid.Case("truncations", "gae", *grid.HEADLINE)
        without = {k: v for k, v in measured_row(case).items() if k != "copy_us"} | {"baselines": {}}
        data = {"environment": {"gpu": "Some GPU"}, "rows": [without]}
        assert set(pictures.draw(data)) == {
            f"{picture}-{theme}.png" for picture in report.PICTURES for theme in pictures.THEMES
        }


@pytest.mark.parametrize("path", ["kernel"], indirect=True)
def test_host_profile_splits_a_call(path, device):
    name, *parts = host_profile.profile("gae", device, (2, 8))
    assert name == "gae" and len(parts) == len(host_profile.HEAD) - 1
    whole, lookup, outputs, launch = map(float, parts[:4])
    assert whole == pytest.approx(lookup + outputs + launch, abs=0.3)


def test_cpu_benchmark_prints_its_ratios(capsys):
    pytest.importorskip("torchrl")
    assert bench_cpu.main(["--shape", "2", "16", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "| function | 2 x 16 |" in out and "| module | 2 x 16 |" in out
