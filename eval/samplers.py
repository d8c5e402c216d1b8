"""Compares the decoders of one run, with paired tests: eval/reports/samplers.py.

python -m eval.samplers runs/eval/<time>
"""

from eval.reports.samplers import main

if __name__ == "__main__":
    main()
