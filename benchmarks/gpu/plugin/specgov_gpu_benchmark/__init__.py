"""What the GPU benchmark runs inside SGLang: acceptance and contestants by request, a record of steps.

Everything that changes between runs rides on the requests' ids (``rid.py``), so that a server is started
once, all tensor-parallel ranks see the same at the same step, and the server need not be told otherwise.
"""
