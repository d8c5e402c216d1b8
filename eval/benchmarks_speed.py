"""What dspec's optimised forms of the heavy parts save: eval/speed/forms/.

python -m eval.benchmarks_speed --only step prefill       (cases whose name starts with these)
"""

from eval.speed.forms.__main__ import main

if __name__ == "__main__":
    main()
