"""Jobs that consist of units of work, shared by ranks and processes, and resumed after a kill.

units --ranks--> this rank's share --helper processes--> a result file for each --> rank 0 has all results

``prepare``, ``measure`` and ``tokenize`` are such jobs. Each defines its units, the work on a unit
(:class:`~energon_lite.storage.sharded_job.work.Work`), and the use of the results. Ranks and processes share nothing
but the folder of the result files.
"""
