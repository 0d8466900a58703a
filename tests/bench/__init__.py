"""The release benchmark in pieces: what is run (`grid`, `workloads`, `modules`, `baselines`), how it is timed
(`timing`), and what is made of the numbers (`reach`, `report`, `pictures`)."""
