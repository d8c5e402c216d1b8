"""Plots tokens per forward pass against quality, one marker per decoder: eval/reports/pareto.py.

python -m eval.pareto picture.png runs/dspark/<time>       (folders of finished runs)
"""

from eval.reports.pareto import main

if __name__ == "__main__":
    main()
