"""``aotops bench``: every operator against what others offer, and against a copy of as many bytes.

work.py says what is measured: operators, shapes, bytes; peers.py against whom; measure.py how; run.py does it;
report.py tells the results. To add an operator, add a row to ``work.WORKS`` and a line to each peer that has it.
"""
