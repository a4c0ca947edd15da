"""Reports to look at: one page of HTML that needs nothing else, of one run or of up to five beside each other."""
