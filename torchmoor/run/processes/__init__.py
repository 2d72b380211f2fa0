"""Several proxy processes on one data port, which route as one."""
