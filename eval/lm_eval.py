"""lm-evaluation-harness with our decoders: its own command line, one more model, and tasks that need no Hub.

    python -m eval.lm_eval --model dspec --model_args checkpoint=<run dir>,decoder=speculative --tasks gsm8k
    python -m eval.lm_eval --model dspec --model_args target=smollm2_135m --tasks dspec_gsm8k,dspec_humaneval --limit 20

model_args are keys of conf/eval.yaml (target, checkpoint, decoder, label, seed, ...), plus batch_size. The tasks of
eval/tasks (dspec_*) read $DSPEC_DATA where it is set. tpf, tau and nfe of each task land in the results under config,
"dspec". Needs the extra `lm-eval`.
"""

import importlib.util
from pathlib import Path
from types import TracebackType

from dspec.config import one_line_errors
from dspec.errors import UserError

TASKS = Path(__file__).resolve().parent / "tasks"
_CHECKS = "lm_eval.config.evaluate_config"  # where lm-eval looks at its arguments; raises ValueError


def main() -> None:
    with one_line_errors():
        if importlib.util.find_spec("lm_eval") is None:
            raise UserError('lm-eval is not installed: run `pip install -e ".[lm-eval]"`')
        _lm_eval()


def _lm_eval() -> None:
    """lm-eval's command line, with our model and our tasks beside its own."""
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
    except ValueError as error:
        if _raised_in(error.__traceback__) != _CHECKS:
            raise
        raise UserError(f"{error}; --help, and `ls tasks` for tasks") from error


def _raised_in(traceback: TracebackType | None) -> str | None:
    """The module whose code raised."""
    name = None
    while traceback is not None:
        name, traceback = traceback.tb_frame.f_globals["__name__"], traceback.tb_next
    return name


if __name__ == "__main__":
    main()
