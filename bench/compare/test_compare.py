"""Tests of what runs no engine: cases, plan, records, tables. Standard library only.

    python3 -m unittest discover -s bench/compare
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import unittest
import xml.dom.minidom
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

import compare
import plan
import report
import runner
from measure import Case, Timing, batch_figures, single_figures

RUN = {"kind": "run", "model": "135m", "threads": 2, "date": "2026-01-02", "ceiling": None,
       "machine": {"cpu": "CPU", "isa": "avx2", "memory_gb": 8, "system": "Linux 6"}}


def case_record(engine, round_number, case, **rest):
    return {"kind": "case", "group": "bf16", "engine": engine, "round": round_number,
            "job": f"bf16/{engine}", "case": case, "weights": "bf16", **rest}


def job_record(engine, round_number, **rest):
    return {"kind": "job", "group": "bf16", "engine": engine, "round": round_number,
            "job": f"bf16/{engine}", "weights": "bf16", "seconds": 1.0, "load_average": 2.0,
            "other_share": 0.05, "version": "1.0", **rest}


def ends(pid):
    """Whether a process is gone, or dead and not yet collected, within some seconds."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def request(prompt_len, num_tokens):
    return {"id": "r", "prompt_token_ids": [5] * prompt_len, "max_tokens": num_tokens}


class Cases(unittest.TestCase):
    def test_labels_are_read_as_they_are_written(self):
        for label in ("A", "B4096", "C@16", "C16@16", "D@64"):
            self.assertEqual(Case.parse(label).label, label)
        self.assertEqual(Case.parse("C@64"), Case("C", 64))

    def test_bad_labels_are_refused(self):
        for label in ("X", "C", "A@2", "C@x", "", "@16"):
            with self.assertRaises(ValueError):
                Case.parse(label)

    def test_cases_that_one_engine_runs_share_no_prompts(self):
        files = [set(Case.parse(label).files(3)) for label in ("C@16", "C@64", "D@16", "D@64")]
        self.assertEqual(len(set().union(*files)), sum(map(len, files)))

    def test_figures_of_single_requests_are_medians(self):
        timings = [Timing(0.1, 0.1 + 9 * token_s, 10) for token_s in (0.01, 0.02, 0.09)]
        figures = single_figures([request(128, 10)] * 3, timings)
        self.assertAlmostEqual(figures["decode_tok_s"], 50)
        self.assertAlmostEqual(figures["ttft_ms"], 100)

    def test_prefill_counts_the_tokens_of_the_prompt(self):
        figures = single_figures([request(1024, 1)], [Timing(0.5, 0.5, 1)])
        self.assertAlmostEqual(figures["prefill_tok_s"], 2048)

    def test_an_output_of_another_length_is_no_result(self):
        with self.assertRaisesRegex(ValueError, "9 tokens instead of 10"):
            single_figures([request(8, 10)], [Timing(0.1, 0.2, 9)])

    def test_a_batch_counts_generated_tokens(self):
        figures = batch_figures([request(8, 30), request(8, 70)], 4.0)
        self.assertAlmostEqual(figures["out_tok_s"], 25)


class Plan(unittest.TestCase):
    def test_every_case_of_the_plan_is_one(self):
        for model in plan.GROUPS:
            for job in plan.jobs(model, plan.Choice(everything=True)):
                self.assertTrue(job.cases, job)

    def test_every_slow_case_is_a_case_of_its_group(self):
        for groups in plan.GROUPS.values():
            for group in groups:
                for entry in group.entries:
                    self.assertLessEqual(set(entry.slow), set(group.cases))

    def test_slow_cases_wait_to_be_asked_for(self):
        def labels(**choice):
            jobs = plan.jobs("135m", plan.Choice(("llama.cpp",), ("bf16",), **choice))
            return {case.label for job in jobs for case in job.cases}

        self.assertNotIn("C@64", labels())
        self.assertIn("C@64", labels(everything=True))

    def test_llama_server_has_one_number_of_slots(self):
        for job in plan.jobs("135m", plan.Choice(("llama.cpp",), everything=True)):
            self.assertEqual(len({case.cap for case in job.cases}), 1, job)

    def test_jobs_of_a_round_have_names_of_their_own(self):
        names = [job.name for job in plan.jobs("135m", plan.Choice(everything=True))]
        self.assertEqual(len(names), len(set(names)))

    def test_a_workload_stands_for_all_its_cases(self):
        choice = plan.Choice(workloads=("C", "D@16"))
        wanted = [label for label in plan.CASES_135M if choice.wants(Case.parse(label))]
        self.assertEqual(wanted, ["C@16", "C@64", "D@16"])

    def test_rounds_begin_with_different_jobs_and_leave_none_out(self):
        for engines in (plan.ENGINES, plan.ENGINES[:3]):
            jobs = plan.jobs("135m", plan.Choice(engines, groups=("bf16",)))
            rounds = [plan.rotated(jobs, number) for number in (1, 2, 3)]
            self.assertEqual(rounds[0], jobs)
            self.assertEqual(len({order[0].name for order in rounds}), 3)
            for order in rounds:
                self.assertEqual(sorted(job.name for job in order),
                                 sorted(job.name for job in jobs))
        self.assertEqual(len(jobs), 3)
        self.assertEqual(plan.rotated(jobs, 4), jobs)


class Records(unittest.TestCase):
    def test_a_job_is_done_when_all_its_cases_have_results(self):
        records = [RUN, case_record("vllm", 1, "A", figures={}), job_record("vllm", 1)]
        self.assertTrue(report.is_done(records, 1, "bf16/vllm", ["A"]))
        self.assertFalse(report.is_done(records, 1, "bf16/vllm", ["A", "B1024"]))
        self.assertFalse(report.is_done(records, 2, "bf16/vllm", ["A"]))

    def test_what_failed_is_not_done_until_it_is_tried_again(self):
        records = [RUN, case_record("vllm", 1, "A", error="no memory"), job_record("vllm", 1)]
        self.assertFalse(report.is_done(records, 1, "bf16/vllm", ["A"]))
        figures = {"ttft_ms": 1.0, "decode_tok_s": 1.0}
        records += [case_record("vllm", 1, "A", figures=figures), job_record("vllm", 1)]
        self.assertTrue(report.is_done(records, 1, "bf16/vllm", ["A"]))
        self.assertEqual(report.collect(records).errors, [])

    def test_a_line_that_was_cut_off_costs_that_line_alone(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "records.jsonl"
            path.write_text('{"kind": "run"}\n{"kind": "ca')
            compare.append(path, [{"kind": "job"}])
            self.assertEqual(runner.read_lines(path), [{"kind": "run"}, {"kind": "job"}])

    def test_quire_reports_times_of_the_first_and_of_the_last_token(self):
        run = {"total_output_tokens": 11, "mean_ttft_ms": 100.0, "mean_tpot_ms": 20.0}
        self.assertEqual(runner.quire_timing(run), Timing(0.1, 0.1 + 0.2, 11))
        first = runner.quire_timing({"total_output_tokens": 1, "mean_ttft_ms": 100.0})
        self.assertEqual(first, Timing(0.1, 0.1, 1))

    def test_a_request_that_failed_is_no_result(self):
        for num_tokens, first_ms, token_ms in ((0, None, None), (5, 100.0, None)):
            with self.assertRaisesRegex(ValueError, "the request failed"):
                runner.quire_timing({"total_output_tokens": num_tokens, "mean_ttft_ms": first_ms,
                                     "mean_tpot_ms": token_ms})

    def test_only_the_time_of_others_counts_as_theirs(self):
        share = runner.other_share((100.0, 10.0), (130.0, 20.0), 10.0)
        self.assertAlmostEqual(share * (runner.os.cpu_count() or 1), 2.0)
        self.assertEqual(runner.other_share((0.0, 0.0), (5.0, 6.0), 10.0), 0.0)


class Processes(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.log = Path(folder.name) / "log"

    def run_python(self, code, timeout_s=20.0):
        return runner.run_process([sys.executable, "-c", code], {}, self.log, timeout_s)

    @unittest.skipUnless(sys.platform == "linux", "memory is read from /proc")
    def test_output_and_memory_of_a_process_are_seen(self):
        ended = self.run_python("import time; a = b'x' * 50_000_000; time.sleep(0.25); print(7)")
        self.assertEqual(ended.stdout, "7\n")
        self.assertGreater(ended.peak_rss, 50_000_000)

    def test_a_process_that_fails_says_why(self):
        with self.assertRaisesRegex(runner.JobError, "ended with 1: no such model"):
            self.run_python("import sys; sys.exit('no such model')")

    def test_a_process_that_hangs_is_ended(self):
        with self.assertRaisesRegex(runner.JobError, "not done after"):
            self.run_python("import time; time.sleep(60)", timeout_s=0.1)

    @unittest.skipUnless(sys.platform == "linux", "processes are read from /proc")
    def test_what_a_process_leaves_behind_is_ended(self):
        for code in (0, 3):
            pid_file = self.log.with_suffix(".pid")
            leaves = ("import subprocess, sys, pathlib; child = subprocess.Popen(['sleep', '60']);"
                      f"pathlib.Path({str(pid_file)!r}).write_text(str(child.pid));"
                      f"sys.exit({code})")
            try:
                self.run_python(leaves)
            except runner.JobError:
                self.assertEqual(code, 3)
            self.assertTrue(ends(int(pid_file.read_text())), f"left behind after exit code {code}")

    def test_memory_of_measuring_ceilings_is_not_the_engines(self):
        settings = runner.Settings(self.log.parent, Path("quire"), 2, 2, 1.0)
        settings.requests.mkdir()
        for repeat in range(2):
            (settings.requests / f"A.{repeat}.jsonl").write_text(json.dumps(request(128, 11)))
        job = plan.Job("bf16", "quire", "model", "bf16", (Case("A"),))
        measured = {"reading": {"percent": 90.0}, "multiplying": None}

        def ended(command, *_):
            plain = "bench" not in command or "--no-ceiling" in command
            run = {"total_output_tokens": 11, "mean_ttft_ms": 100.0 if plain else 900.0,
                   "mean_tpot_ms": 20.0, "ceiling": None if plain else measured}
            return runner.Ended(json.dumps({"runs": [run]}), 0.5, 1000 if plain else 9000)

        with (mock.patch("runner.run_process", ended),
              mock.patch("runner.quire_version", lambda _: "1.0")):
            case, whole = runner.run_job(settings, job, self.log)
        self.assertEqual(whole["peak_rss"], 1000)
        self.assertEqual(case["ceiling"], {"reading": 90.0})
        self.assertAlmostEqual(case["figures"]["ttft_ms"], 100.0)

    def test_a_missing_engine_is_an_error_of_its_cases(self):
        settings = runner.Settings(self.log.parent, Path("/none"), 1, 1, 1.0)
        job = plan.Job("bf16", "vllm", "model", "bf16", (Case("A"), Case("C", 16)))
        case, other, whole = runner.run_job(settings, job, self.log)
        self.assertEqual([case["case"], other["case"], whole["kind"]], ["A", "C@16", "job"])
        for record in (case, other, whole):
            self.assertIn("run make compare-setup", record["error"])


class Cores(unittest.TestCase):
    def usable(self, groups, files, cores=8):
        """`compare.usable_cores` of a process in `groups`, with these files of the groups."""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in {**files, "self": groups}.items():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                (Path(folder) / name).write_text(text)
            with mock.patch("os.sched_getaffinity", lambda _: set(range(cores))):
                return compare.usable_cores(Path(folder) / "self", Path(folder))

    def test_without_a_quota_the_cores_count(self):
        self.assertEqual(self.usable("0::/\n", {}), 8)
        self.assertEqual(self.usable("0::/a\n", {"a/cpu.max": "max 100000\n"}), 8)
        self.assertEqual(self.usable("0::/a\n", {"a/cpu.max": "900000 100000\n"}), 8)

    def test_the_least_quota_of_the_groups_counts(self):
        files = {"a/b/cpu.max": "600000 100000\n", "a/cpu.max": "250000 100000\n"}
        self.assertEqual(self.usable("0::/a/b\n", files), 2)
        self.assertEqual(self.usable("0::/a\n", {"a/cpu.max": "50000 100000\n"}), 1)

    def test_version_1_has_its_quota_in_two_files(self):
        files = {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n",
                 "cpu/a/cpu.cfs_quota_us": "300000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}
        groups = "9:memory:/b\n4:cpu,cpuacct:/a\n0::/\n"
        self.assertEqual(self.usable(groups, files), 3)
        self.assertEqual(self.usable("4:cpu,cpuacct:/\n", files), 8)


class Report(unittest.TestCase):
    def results(self):
        records = [RUN]
        for number, (ours, vllm, hf) in enumerate(((100, 40, 20), (60, 30, 20), (90, 30, 18)), 1):
            for engine, speed in (("quire", ours), ("vllm", vllm), ("transformers", hf)):
                figures = {"decode_tok_s": speed, "ttft_ms": 1000 / speed}
                records += [case_record(engine, number, "A", figures=figures),
                            job_record(engine, number, first_token_s=1.5, peak_rss=2e9)]
        records.append(case_record("vllm", 1, "C@16", error="it broke | badly"))
        return report.collect(json.loads(json.dumps(records)))

    def test_ratios_compare_within_a_round(self):
        decode, first, *_ = self.results().figures
        self.assertEqual(decode.best_peer(), "vllm")
        self.assertAlmostEqual(decode.ratio("vllm"), 2.5)  # of 2.5, 2 and 3
        self.assertAlmostEqual(first.ratio("vllm"), 2.5)  # less is better: the same
        self.assertEqual(first.best_peer(), "vllm")

    def test_the_table_has_medians_ranges_and_ratios(self):
        text = report.markdown(self.results())
        self.assertIn(
            "| decode, 1 request, tok/s | 90.0 (60.0–100) | **30.0** (30.0–40.0) · 2.50 × |"
            " 20.0 (18.0–20.0) · 5.00 × | **2.50 ×** |", text)
        self.assertIn("Medians of 3 rounds", text)

    def test_shares_of_ceilings_stand_beside_what_they_bound(self):
        self.assertNotIn("of the ceiling", report.markdown(self.results()))
        ceiling = runner.percents({"ceiling": {"reading": {"percent": 94.0}, "multiplying": None}})
        figures = {"decode_tok_s": 100.0, "ttft_ms": 9.0}
        records = [{**RUN, "ceiling": {"read_huge_pages": 44.5e9, "read_small_pages": 30e9,
                                       "bf16": 1000e9, "int8": 2000e9, "read_l3": None}},
                   case_record("quire", 1, "A", figures=figures, ceiling=ceiling),
                   job_record("quire", 1)]
        text = report.markdown(report.collect(records))
        self.assertIn("| decode, 1 request, tok/s | 100 | – | 94 % read |", text)
        self.assertIn("| first token, prompt of 128, ms | 9.00 | – | – |", text)
        self.assertIn("44.5 GB/s read from huge pages", text)

    def test_a_failure_is_a_cell_and_says_why(self):
        text = report.markdown(self.results())
        self.assertIn("| C: 64 mixed requests, 16 at once, tok/s | – | failed | – | – |", text)
        self.assertIn("- round 1, bf16, vLLM, C@16: it broke", text)

    def test_rounds_that_only_one_engine_has_make_no_ratio(self):
        records = [RUN, case_record("quire", 1, "B1024", figures={"prefill_tok_s": 10.0}),
                   case_record("vllm", 2, "B1024", figures={"prefill_tok_s": 10.0})]
        self.assertIsNone(report.collect(records).figures[0].ratio("vllm"))

    def test_the_picture_is_xml_with_a_bar_for_each_ratio(self):
        picture = xml.dom.minidom.parseString(report.picture(self.results()))
        bars = [rect for rect in picture.getElementsByTagName("rect")
                if rect.getAttribute("height") == str(report.BAR - 2)]
        legend = 2
        self.assertEqual(len(bars) - legend, 4)  # two figures, two peers


if __name__ == "__main__":
    unittest.main()
