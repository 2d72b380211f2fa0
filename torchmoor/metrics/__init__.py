"""Counters and histograms of the proxy. They read no state of other packages.

What is counted where:
- definition.py says what a metric is (name, type, unit, labels and help), and writes its values in Prometheus' form.
- invocations.py holds one variant's counts. proxy.dispatch counts choices and retries, proxy.api statuses and times,
  async_inference asynchronous requests, whose backlog is in backlog.py.
- process_counts.py holds what belongs to no variant, such as refused callers. run/data_plane.py fills it.
- host.py reads the machine's load. admin/collectors.py reads the fleet's state and renders the metrics page.
- handlers/chat/metrics.py defines a worker's metrics. TorchServe shows them; fleet/scraper.py adds them to the page.
"""
