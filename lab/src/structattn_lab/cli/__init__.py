"""The commands that train, compare, measure and report: ``structattn`` finds them by the entry point of this
package. Only this folder prints.
"""
