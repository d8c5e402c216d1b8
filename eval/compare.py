"""Compares methods across runs, with paired differences: eval/reports/comparison.py.

python -m eval.compare runs/sweep/<time>/*/       (folders of finished runs)
"""

from eval.reports.comparison import main

if __name__ == "__main__":
    main()
