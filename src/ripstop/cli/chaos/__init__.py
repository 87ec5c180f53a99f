"""`ripstop chaos`: `plan` makes the schedule, `experiment` decides, both pure; `driver` talks to the job."""
