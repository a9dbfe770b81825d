"""Pipeline parallelism: which stages a rank holds, and running them by torch's schedules."""
