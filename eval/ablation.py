"""Noise schedules of Jacobi Forcing side by side: eval/reports/schedules.py.

python -m eval.ablation runs/sweep/<time>/*/
"""

from eval.reports.schedules import main

if __name__ == "__main__":
    main()
