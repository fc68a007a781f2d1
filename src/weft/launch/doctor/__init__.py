"""`weft doctor`: what this machine, and the way between several, can run.

A check is a function that returns a Finding; `command` says which are made and how long each may
take, and adding one there is all that a new one needs. What is between hosts is compared by pure
functions of what they all said.
"""
