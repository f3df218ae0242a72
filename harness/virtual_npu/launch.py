def launch(program, arguments, grid, state):
    from .driver import KernelRun
    return KernelRun(program.name, grid)
