"""``aotops bench``: every operator against what others offer, and against a copy of as many bytes.

work.py says what is measured: kinds of operators, their shapes, bytes; baselines.py against whom; measure.py how;
run.py does it; precompile.py compiles in several processes before; report.py tells the results. Operators are measured
as their rows say (tests/cases); to compare one with another library, add a line to that library's baseline.
"""
