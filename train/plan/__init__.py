"""Planning a distributed run before it runs: pipeline schedules, balance, memory, time, strategy."""
