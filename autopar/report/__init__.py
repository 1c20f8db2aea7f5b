"""Plans for people: tables for a terminal, one HTML page, what differs between two plans.

Nothing is imported here: `autopar.report.terminal` needs rich and `autopar.report.page` needs jinja2, and a
command pays only for what it shows.
"""
