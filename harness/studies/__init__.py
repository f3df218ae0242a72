"""What is asked of the virtual NPU about this project's kernels: calibration on the textbook
kernel, sensitivity, the mutation and schedule surveys, traces and profiles. The virtual NPU
itself knows compiled programs only."""
