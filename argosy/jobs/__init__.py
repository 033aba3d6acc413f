"""The work of each verb of the command line, composed from the other rooms. The only room that knows them all."""
