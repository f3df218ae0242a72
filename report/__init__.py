"""REPORT.md, its figures and the HTML page, from the files in results/.

`python -m report` (`make report`) rewrites what stands between the markers of REPORT.md and
README.md, and the pictures in figures/; the text around the markers is written by hand.
Nothing here runs a kernel.
"""
