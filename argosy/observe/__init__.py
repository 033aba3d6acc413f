"""Reports on runs: metrics, logs, the terminal, the HTML report, trackers, profiles, and the time that a run spent by cause."""
