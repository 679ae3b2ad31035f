"""Work that is divided into units, for ranks and processes, and that goes on where it was after a kill.

units --ranks--> this rank's share --helpers--> a result file for each --job--> rank 0 has all results

``prepare``, ``measure`` and ``tokenize`` are such jobs. Each says what its units are, what is done with one (its
:class:`~energon_lite.storage.sharded_job.work.Work`), and what becomes of the results. Ranks and processes share
nothing but the folder of the result files.
"""
