"""Compares noise schedules of Jacobi Forcing: eval/reports/schedules.py.

python -m eval.ablation runs/sweep/<time>/*/
"""

from eval.reports.schedules import main

if __name__ == "__main__":
    main()
