class P:
    def __init__(s,n,t): s.name=n; s.text=t
def load_program(n,t):
    import os
    open(os.environ.get("HIVM_DUMP","/tmp")+"/"+n+".mlir","w").write(t); return P(n,t)
