"""Scores benchmarks by the exact log-likelihood of their answers: eval/likelihood/.

python -m eval.score checkpoint=runs/as_arm/<time> decoder=any_subset benchmark=lambada
"""

from eval.likelihood.__main__ import main

if __name__ == "__main__":
    main()
