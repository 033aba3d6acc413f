"""The work of each verb of the command line, composed from the other packages. Only this package knows all of them."""
