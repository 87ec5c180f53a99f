"""`ripstop chaos`: `plan` makes the schedule, `experiment` decides, `results` shows; `driver` talks to the job."""
