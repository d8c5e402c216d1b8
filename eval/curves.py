"""Draws quality against tokens per forward pass along a setting of a run's decoders: eval/reports/curves.py.

python -m eval.curves runs/eval/<time> --along threshold
"""

from eval.reports.curves import main

if __name__ == "__main__":
    main()
