"""HumanEval+ and MBPP+ (Liu et al. 2023, arXiv 2305.01210; data Apache-2.0, MBPP itself CC-BY-4.0).

Data, stop strings and sanitising come at run time from the installed evalplus; programs are run, and outputs compared
by evalplus's rules, by our own judge. Prompt: the problem's text, completed raw as evalplus does for base models; or as
chat, a request for the whole function in a code block (our own wording: evalplus opens the assistant's turn itself,
which a user turn cannot). The program is evalplus's `sanitize` of prompt + completion, or of the chat answer; there is
none if it fails or times out ("undecided"). Verdicts: "base" is the original tests' inputs, "plus" those and
evalplus's own, as on its leaderboard.
"""

import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
from pathlib import Path
from typing import Any, Unpack

from data.rows import DataRow, Rows, data_file, load_rows
from dspec.errors import UserError
from eval.benchmarks.base import Extent, FileBenchmark, Item
from eval.benchmarks.code import code_prompt, cut
from eval.sandbox.function_process import FunctionProcess, Reply
from eval.sandbox.judge import Judge

_SANITIZER = Path(__file__).with_name("sanitize_process.py")
_ASK = "Solve this problem. Answer with the whole function, and the imports that it needs, in one code block."
_FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "base_input", "plus_input", "atol", "contract")
# evalplus 0.3.1 against its own canonical solutions
_FAILURES = {
    "humaneval": {
        "HumanEval/32": "evalplus 0.3.1 fails every answer (its oracle counts no input as done); judged by its formula"
    },
    "mbpp": {
        "Mbpp/255": "canonical outputs need more than evalplus's 4 GB: plus is failed without a run, as evalplus does",
        "Mbpp/630": "evalplus's sanitize drops the canonical solution's helper, a generator without return",
    },
}
_TOO_BIG = frozenset({"Mbpp/255"})


def _module(name: str) -> Any:
    if importlib.util.find_spec("evalplus") is None:
        raise UserError("HumanEval+ and MBPP+ are defined by evalplus: run `pip install 'dspec[evalplus]'`")
    return importlib.import_module(f"evalplus.{name}")


def problems(dataset: str, file: str) -> Rows:
    """The problems as evalplus reads them, from $DSPEC_DATA/<file>.jsonl[.gz] or evalplus's own download."""
    variable = f"{dataset.upper()}_OVERRIDE_PATH"
    module, path = _module(f"data.{dataset}"), data_file(file)
    if path is not None:
        load_rows(file, hub=None, fields=_FIELDS)  # its errors name file and line
    # evalplus reads this environment variable once, on import; so set the resulting attribute as well
    setattr(module, variable, None if path is None else str(path))
    name = {"humaneval": "human_eval_plus", "mbpp": "mbpp_plus"}[dataset]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            rows = list(getattr(module, f"get_{name}")().values())
        used = Path(getattr(module, f"_ready_{name}_path")())
    except OSError as error:
        raise UserError(
            f"evalplus cannot fetch its data ({type(error).__name__}); set DSPEC_DATA to a folder with {file}.jsonl.gz"
        ) from error
    return Rows(rows, str(used), hashlib.sha256(used.read_bytes()).hexdigest())


class _Plus(FileBenchmark):
    quality = "plus"
    dataset: str
    file: str

    def __init__(self, *, judge: Judge, chat: bool, timeout_s: float, **extent: Unpack[Extent]) -> None:
        """`timeout_s` limits evalplus's sanitize on one answer."""
        self.chat, self._judge = chat, judge
        self._references: dict[tuple[str, str], list[Any]] = {}
        utility = _module("provider.utility")
        stop = (*utility.EOS, *utility.extra_eos_for_direct_completion(self.dataset))
        self.stop: tuple[str, ...] = () if chat else stop
        refusal = "evalplus's sanitize does not start; run `pip install 'dspec[evalplus]'`"
        self._sanitizer = FunctionProcess(_SANITIZER, timeout_s=timeout_s, refusal=refusal)
        how = f"chat; {_ASK}" if chat else "raw completion of the problem's text, as evalplus for base models"
        data = problems(self.dataset, self.file)
        super().__init__(data, key=lambda _, r: str(r["task_id"]), describes=how, **extent)

    def source(self) -> dict[str, Any]:
        version = importlib.metadata.version("evalplus")
        judged_by = {"evalplus": version, "known_failures": _FAILURES[self.dataset], "sandbox": self._judge.level}
        return {**super().source(), **judged_by}

    def prompt(self, row: DataRow) -> str:
        text = str(row["prompt"]).strip() + "\n"
        return code_prompt(text, ask=_ASK) if self.chat else text

    def program(self, item: Item, answer: str) -> Reply:
        """evalplus's program for an answer, if sanitize succeeds."""
        text = answer if self.chat else item.prompt + cut(answer, self.stop)
        return self._sanitizer.ask(text, self._rows[item.id]["entry_point"])

    def verdicts(self, item: Item, answer: str) -> dict[str, bool]:
        how, program = self.program(item, answer)
        base = how == "answered" and self._passes(item, program, "base_input")
        plus = base and item.id not in _TOO_BIG and self._passes(item, program, "plus_input")
        return {"base": base, "plus": plus, "undecided": how in ("died", "timed out")}

    def _passes(self, item: Item, program: str, which: str) -> bool:
        row, inputs = self._rows[item.id], self._rows[item.id][which]
        name, atol = row["entry_point"], float(row["atol"])
        expected = self._reference(item, which)
        return self._judge.agrees(
            program=program, entry_point=name, inputs=inputs, expected=expected, atol=atol, dataset=self.dataset
        ).passed

    def _reference(self, item: Item, which: str) -> list[Any]:
        """The canonical solution's outputs on a problem's inputs; computed once."""
        if (item.id, which) not in self._references:
            row = self._rows[item.id]
            self._references[item.id, which] = self._judge.answers(
                program=row["prompt"] + row["canonical_solution"],
                entry_point=row["entry_point"],
                inputs=row[which],
                dataset=self.dataset,
            )
        return self._references[item.id, which]


class HumanEvalPlus(_Plus):
    dataset, file = "humaneval", "humanevalplus_v0.1.10"


class MbppPlus(_Plus):
    dataset, file = "mbpp", "mbppplus_v0.2.0"
