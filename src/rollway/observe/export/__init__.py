"""Give a stack to Prometheus, Grafana and Kubernetes: `rollway observe export`.

    prometheus.py   the scrape config, and the list of targets that it reads (file_sd)
    following.py    `--follow`: a page of Rollway's own metrics, and targets that stay true
    rules.py        recording rules and alerts
    grafana.py      a dashboard
    podmonitors.py  the same for Prometheus' operator, by the labels of pods

The metrics are those of docs/metrics.md. Rollway's own come from the record of the run, those of
workers and frontends from their own pages.
"""
