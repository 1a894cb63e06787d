"""The page for people, at `/console`: what a pool does right now, and a few controls.

`assets` serves the page itself, which says nothing of anybody. `sight` reads the mirrors in Redis,
`board` turns them into what changed since the last look, `feed` sends that to whoever watches, and
each sees no more than its tenant may. Nothing here is on the way of a request.
"""
