"""What tiers hold now, to look at: a page on the server's own port, and ``sglang-qevict top``.

Nothing is computed unless somebody looks. ``routes`` is the HTTP server's side, ``look`` the
scheduler's; ``page.html`` is all that a browser gets, and keeps the history that it shows.
"""
