"""The harness: configs, references, error measures, checks, devices, baselines, one evaluator."""
