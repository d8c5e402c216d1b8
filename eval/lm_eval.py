"""lm-evaluation-harness with our decoders: its own command line, one more model, and tasks that need no Hub.

    python -m eval.lm_eval --model dspec --model_args checkpoint=<run dir>,decoder=speculative --tasks dspec_gsm8k
    python -m eval.lm_eval --model dspec --model_args target=smollm2_135m --tasks dspec_gsm8k,dspec_humaneval --limit 20

model_args are keys of conf/eval.yaml (target, checkpoint, decoder, label, seed, ...), plus batch_size. The tasks of
eval/tasks (dspec_*) read $DSPEC_DATA if it is set. tpf, tau and nfe of each task are in the results under config,
"dspec". Needs the extra `lm-eval`.
"""

import importlib.util
import sys
from pathlib import Path
from types import TracebackType

from dspec.config.compose import one_line_errors
from dspec.errors import UserError

TASKS = Path(__file__).resolve().parent / "tasks"
_CHECKS = "lm_eval.config.evaluate_config"  # where lm-eval checks its arguments; raises ValueError


def main() -> None:
    with one_line_errors():
        if importlib.util.find_spec("lm_eval") is None:
            raise UserError('lm-eval is not installed: run `pip install -e ".[lm-eval]"`')
        if any(arg.partition("=")[0] == "--device" for arg in sys.argv[1:]):
            raise UserError("--device is not read: set target.device=... in --model_args, next to target=<name>")
        _lm_eval()


def _lm_eval() -> None:
    """lm-eval's command line with our model and tasks added."""
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    from eval import lm_model  # noqa: F401  (registers the model)

    setup_logging()
    cli = HarnessCLI()
    args = cli.parse_args()
    if args.command is not None:
        args.include_path = [str(TASKS), *([args.include_path] if args.include_path else [])]
    try:
        cli.execute(args)
    except ConnectionError as error:  # the data sets library's, for a task of lm-eval's own
        raise UserError(
            f"{error}: lm-eval's own tasks read their data from the Hub; without a network use those of eval/tasks, "
            "such as --tasks dspec_gsm8k with DSPEC_DATA=<folder>"
        ) from error
    except ValueError as error:
        if _raised_in(error.__traceback__) != _CHECKS:
            raise
        raise UserError(f"{error}; --help, and `ls tasks` for tasks") from error


def _raised_in(traceback: TracebackType | None) -> str | None:
    """Name of the module that raised."""
    name = None
    while traceback is not None:
        name, traceback = traceback.tb_frame.f_globals["__name__"], traceback.tb_next
    return name


if __name__ == "__main__":
    main()
