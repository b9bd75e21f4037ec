"""`rollway dash`: a page that shows what a stack does, or what a recorded run has done.

    run directory ── entries ──► view (pure) ── sections ──► server ── server-sent events ──► page

It only reads.
"""
